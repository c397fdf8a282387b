# To use another base image, or to pin this one by its digest: docs/how-to/install-verified-packages.md.
ARG PYTHON_IMAGE=python:3.12.13-slim-bookworm
FROM ${PYTHON_IMAGE}
WORKDIR /app
# .dockerignore lists the only files that are copied: sources, but no key, token or state.
COPY . .
# A site's client needs only deploy/locks/client.txt. example.txt adds scikit-learn, which has the example's data.
# The compiler builds the codec's kernels, and is removed again. (Without kernels torch computes the same, slower.)
RUN apt-get update && apt-get install -y --no-install-recommends g++ \
    && pip install --no-cache-dir --require-hashes -r deploy/locks/build.txt -r deploy/locks/example.txt \
    && pip install --no-cache-dir --no-deps --no-build-isolation . \
    && apt-get purge -y --auto-remove g++ && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 umbel && install -d -o umbel -g umbel /state /sites/site-1 /sites/site-2
USER umbel
VOLUME /state
