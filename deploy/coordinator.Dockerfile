FROM python:3.12-slim
WORKDIR /app
COPY . .
# torch first and alone: its pin decides which build is taken.
# The compiler is for the codec's kernels (torch would compute the same, slower), and is gone again from the layer.
RUN apt-get update && apt-get install -y --no-install-recommends g++ \
    && pip install --no-cache-dir -c constraints.txt torch \
    && pip install --no-cache-dir -c constraints.txt '.[server,postgres,s3]' \
    && apt-get purge -y --auto-remove g++ && rm -rf /var/lib/apt/lists/*
# The same user id in both images: the operator container reads the admin key, which only its owner may.
RUN useradd --uid 10001 umbel && install -d -o umbel -g umbel /data
USER umbel
VOLUME /data
EXPOSE 8750
CMD ["umbel", "serve", "--data", "/data", "--host", "0.0.0.0", "--port", "8750"]
