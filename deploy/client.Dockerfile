FROM python:3.12-slim
WORKDIR /app
COPY . .
# A device needs only `umbel`; scikit-learn is here because the example hospital's data come with it.
# The compiler is for the codec's kernels (torch would compute the same, slower), and is gone again from the layer.
RUN apt-get update && apt-get install -y --no-install-recommends g++ \
    && pip install --no-cache-dir -c constraints.txt torch && pip install --no-cache-dir -c constraints.txt . scikit-learn \
    && apt-get purge -y --auto-remove g++ && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 umbel && install -d -o umbel -g umbel /state /sites/site-1 /sites/site-2
USER umbel
VOLUME /state
