FROM python:3.12-slim
WORKDIR /app
COPY . .
# torch first and alone: its pin decides which build is taken.
RUN pip install --no-cache-dir -c constraints.txt torch && pip install --no-cache-dir -c constraints.txt '.[server,postgres,s3]'
# The same user id in both images: the operator container reads the admin key, which only its owner may.
RUN useradd --uid 10001 umbel && install -d -o umbel -g umbel /data
USER umbel
VOLUME /data
EXPOSE 8750
CMD ["umbel", "serve", "--data", "/data", "--host", "0.0.0.0", "--port", "8750"]
