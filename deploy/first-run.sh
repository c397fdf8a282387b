#!/bin/sh
# The operator's first steps against a new coordinator: a model, a run, and one enrolment token per site.
# You can run it again: it does not create a second run, and a site that has a token keeps it.
set -eu
: "${UMBEL_SERVER:?the coordinator's address}"
data="${COORDINATOR_DATA:-/data}"
sites="${SITES_DIR:-/sites}"
work="$(mktemp -d)"

umbel model init --app examples.my_hospital:client --out "$work/init.safetensors"
umbel run create examples/breast_cancer.toml --model "$work/init.safetensors" --admin-key-file "$data/admin.key"
for site in "$sites"/*; do
    [ -s "$site/token" ] || umbel token create --name "$(basename "$site")" --admin-key-file "$data/admin.key" >"$site/token"
done
