FROM python:3.12-slim
WORKDIR /app
COPY . .
# A device needs only `umbel`; scikit-learn is here because the example hospital's data come with it.
RUN pip install --no-cache-dir -c constraints.txt torch && pip install --no-cache-dir -c constraints.txt . scikit-learn
RUN useradd --uid 10001 umbel && install -d -o umbel -g umbel /state /sites/site-1 /sites/site-2
USER umbel
VOLUME /state
