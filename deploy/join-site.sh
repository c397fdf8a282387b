#!/bin/sh
# One example hospital: enrols with the token the operator left for it, then trains until the run is finished.
set -eu
exec umbel join --server "${UMBEL_SERVER:?the coordinator's address}" --token-file "${STATE:-/state}/token" \
    --app examples.my_hospital:client --run breast-cancer --name "$1" --state "${STATE:-/state}/$1"
