#!/bin/sh
# Makes, in this directory, a certificate for the service (tls.crt, tls.key), and the patch with which the API server
# knows the authority (ca-bundle.yaml). The authority is made unless there is one; its key stays in a directory of your
# own, AUTHORITY (~/.cachefs-authority): whoever has it can be the service. Run it again before the certificate ends,
# after DAYS days (365), and apply again: nothing needs a restart.
set -eu
cd "$(dirname "$0")"
authority=${AUTHORITY:-$HOME/.cachefs-authority}
days=${DAYS:-365}
name=cachefs-scheduler.cachefs.svc
umask 077
mkdir -p "$authority"
# Where the one before was made: beside the manifests.
if [ -e ca.key ] && [ ! -e "$authority/ca.key" ]; then
    mv ca.key "$authority/ca.key"
    cp ca.crt "$authority/ca.crt"
    chmod 600 "$authority/ca.key"
fi
[ -e "$authority/ca.key" ] || openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes \
    -keyout "$authority/ca.key" -out "$authority/ca.crt" \
    -days 3650 -subj /CN=cachefs-authority -addext keyUsage=critical,keyCertSign,cRLSign
cp "$authority/ca.crt" ca.crt
openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout tls.key -out tls.csr -subj "/CN=$name"
printf 'subjectAltName=DNS:%s,DNS:%s.cluster.local\nextendedKeyUsage=serverAuth\nauthorityKeyIdentifier=keyid\n' \
    "$name" "$name" >tls.ext
openssl x509 -req -in tls.csr -CA "$authority/ca.crt" -CAkey "$authority/ca.key" -CAcreateserial \
    -CAserial "$authority/ca.srl" -out tls.crt -days "$days" -extfile tls.ext
rm -f tls.csr tls.ext
cat >ca-bundle.yaml <<PATCH
- op: add
  path: /webhooks/0/clientConfig/caBundle
  value: $(base64 <ca.crt | tr -d '\n')
PATCH
