#!/bin/sh
# Makes, in this directory, an authority (ca.crt, ca.key) unless there is one, a certificate of it for the service
# (tls.crt, tls.key), and the patch with which the API server knows the authority (ca-bundle.yaml). Run it again before
# the certificate ends, after DAYS days (365), and apply again: nothing needs a restart.
set -eu
cd "$(dirname "$0")"
days=${DAYS:-365}
name=cachefs-scheduler.cachefs.svc
umask 077
[ -e ca.key ] || openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout ca.key -out ca.crt \
    -days 3650 -subj /CN=cachefs-authority -addext keyUsage=critical,keyCertSign,cRLSign
openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout tls.key -out tls.csr -subj "/CN=$name"
printf 'subjectAltName=DNS:%s,DNS:%s.cluster.local\nextendedKeyUsage=serverAuth\nauthorityKeyIdentifier=keyid\n' \
    "$name" "$name" >tls.ext
openssl x509 -req -in tls.csr -CA ca.crt -CAkey ca.key -CAcreateserial -out tls.crt -days "$days" -extfile tls.ext
rm -f tls.csr tls.ext
cat >ca-bundle.yaml <<PATCH
- op: add
  path: /webhooks/0/clientConfig/caBundle
  value: $(base64 <ca.crt | tr -d '\n')
PATCH
