#!/bin/sh
# Makes a password for each role of users.acl: `secrets/ROLE`, and `secrets/users.acl` with
# their hashes. Compose and kustomize take both from there. To rotate: OPERATIONS.md.
set -eu
cd "$(dirname "$0")"

umask 077
mkdir -p secrets
cp users.acl secrets/users.acl.new
sed -n 's/^user \([a-z]*\) on .*/\1/p' users.acl | while read -r role; do
    password=$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')
    printf %s "$password" > "secrets/$role"
    hash=$(printf %s "$password" | sha256sum | cut -d' ' -f1)
    sed -i "s/^user $role on >[^ ]*/user $role on #$hash/" secrets/users.acl.new
done
# In place: a container has this very file mounted.
cat secrets/users.acl.new > secrets/users.acl
rm secrets/users.acl.new
# Containers run as other users. The directory keeps everybody else out.
chmod 644 secrets/*
