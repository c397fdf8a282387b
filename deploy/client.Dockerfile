# Another base, or this one by its digest: docs/how-to/install-verified-packages.md.
ARG PYTHON_IMAGE=python:3.12.13-slim-bookworm
FROM ${PYTHON_IMAGE}
WORKDIR /app
# .dockerignore is a list of what may come along: sources, no key, no token, no state.
COPY . .
# A device needs deploy/locks/client.txt; the example hospital's data come with scikit-learn, which example.txt adds.
# The compiler is for the codec's kernels (torch would compute the same, slower), and is gone again from the layer.
RUN apt-get update && apt-get install -y --no-install-recommends g++ \
    && pip install --no-cache-dir --require-hashes -r deploy/locks/build.txt -r deploy/locks/example.txt \
    && pip install --no-cache-dir --no-deps --no-build-isolation . \
    && apt-get purge -y --auto-remove g++ && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 umbel && install -d -o umbel -g umbel /state /sites/site-1 /sites/site-2
USER umbel
VOLUME /state
