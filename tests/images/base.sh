#!/usr/bin/env bash
# A base for the images where none can be pulled: Debian with Python, made by debootstrap and imported
# as the image $1. Needs root, debootstrap and podman.
set -euo pipefail
image=${1:-localhost/outrider-base:bookworm}
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$root" >&2
rm -rf "$root"/usr/share/{doc,locale,man,info} "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/*
chmod 755 "$root"
tar -C "$root" -c . | "${CONTAINER:-podman}" import --change 'CMD=["/bin/bash"]' - "$image"
