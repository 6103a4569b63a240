#!/bin/sh
# Makes a certificate authority, and a certificate that it signs for each
# machine, for TLS between the machines of a Ray cluster:
#   sh scripts/ray_certificates.sh FOLDER ADDRESS...
# An authority that is already in the folder is used again.

set -eu

if [ $# -lt 2 ]; then
  echo 'Usage: sh scripts/ray_certificates.sh FOLDER ADDRESS...' >&2
  exit 2
fi
folder=$1
shift
days=365
umask 077
mkdir -p -- "$folder"
cd -- "$folder"

if [ ! -f ca.key ]; then
  openssl req -x509 -newkey rsa:3072 -nodes -days "$days" \
      -subj '/CN=tff_bn Ray cluster' -keyout ca.key -out ca.crt 2>/dev/null
fi
for address; do
  # Ray's processes on a machine also connect to one another.
  names="DNS:localhost,IP:127.0.0.1"
  case $address in
    *[!0-9.]*) names="$names,DNS:$address" ;;
    *) names="$names,IP:$address" ;;
  esac
  openssl req -newkey rsa:3072 -nodes -subj "/CN=$address" \
      -keyout "$address.key" -out "$address.csr" 2>/dev/null
  printf 'subjectAltName=%s\n' "$names" >"$address.ext"
  openssl x509 -req -in "$address.csr" -CA ca.crt -CAkey ca.key \
      -CAcreateserial -days "$days" -extfile "$address.ext" \
      -out "$address.crt" 2>/dev/null
  rm -- "$address.csr" "$address.ext"
  echo "$folder/$address.crt and .key are for $address; ca.crt is for all."
done
