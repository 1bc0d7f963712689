"""No secret stays in a text, known or not; and what helps a maintainer does."""

import base64
import hashlib
import json
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs_tools.debug_bundle.redaction import REMOVED, Redaction, file_secrets, url_secrets, variable_secrets

# Where a secret that nobody knows of may stand.
PLACES = (
    "https://user:{}@host/bucket/key",
    "GET https://host/b/k?X-Amz-Signature={}&X-Amz-Credential=AKIA failed",
    "az://c/p?sv=1&sig={}",
    "Authorization: AWS4-HMAC-SHA256 Credential={}, Signature=1",
    "authorization: Bearer {}",
    "X-Amz-Security-Token: {}",
    "Cookie: a=b; session={}",
    "AWS_SECRET_ACCESS_KEY={}",
    "export AWS_SESSION_TOKEN='{}'",
    'aws_secret_access_key = "{}"',
    "--password {}",
    '{{"api_key": "{}", "x": 1}}',
    "-----BEGIN PRIVATE KEY-----\n{}\n-----END PRIVATE KEY-----",
    "-----BEGIN EC PRIVATE KEY-----\n{} and no end",
    "the key {} was refused",
    "({})",
    "path/{}/x",
    "Basic {}",
)
HELPFUL = (
    "2026-11-26T10:00:00+0000 node-17 cachefsd[4711]: ready on /run/cachefs/cachefsd.sock",
    "s3://bucket/train/n01440764/n01440764_10026.JPEG at https://s3.example.com:9000: the server answers 503 SlowDown",
    "OriginUnavailable RequestTimeTooSkewed SignatureDoesNotMatch NoSuchBucket",
    "/var/lib/cachefs/snapshots, 00000017.seg, shard-00012-of-01024.tar, 192.168.17.204:7071, [fe80::1]:7070",
    "fetched 12,345,678 blocks in 0.123456789 s; created 1795688042123456789",
    "Linux 6.18.44-generic x86_64, python3.11, /usr/lib/python3/dist-packages/cachefs_daemon",
)


def secret_of(number: int) -> str:
    return base64.b64encode(hashlib.sha256(str(number).encode()).digest()[:30]).decode()


@pytest.mark.parametrize("place", PLACES)
@given(number=st.integers(), kind=st.sampled_from(["base64", "hex", "url"]))
def test_unknown_secrets_go_wherever_they_stand(place: str, number: int, kind: str) -> None:
    secret = secret_of(number)
    secret = {"hex": hashlib.md5(secret.encode()).hexdigest(), "url": secret.replace("/", "-").replace("+", "_")}.get(
        kind, secret
    )
    clean = Redaction([]).redact_text(place.format(secret))
    assert secret not in clean
    # Nor a good part of it.
    assert all(secret[start : start + 16] not in clean for start in range(len(secret) - 16))


@given(secret=st.text(min_size=6, max_size=60).filter(lambda text: not text.isspace()), around=st.text(max_size=30))
def test_known_secrets_go_in_every_form(secret: str, around: str) -> None:
    redaction = Redaction([secret])
    document = {"a": [around + secret + around], secret: 1, "url": f"http://h/{quote(secret, safe='')}"}
    clean = redaction.redact_document(document)
    text = json.dumps(clean, ensure_ascii=False)
    assert redaction.is_clean(text) or secret in json.dumps({"a": [REMOVED], "url": f"http://h/{REMOVED}"})
    assert not redaction.is_clean(secret)
    encoded = base64.b64encode(secret.encode(errors="surrogatepass")).decode() if secret.isascii() else ""
    assert not encoded or encoded.rstrip("=") not in redaction.redact_text(f"x {encoded} y")


@pytest.mark.parametrize("text", HELPFUL)
def test_what_helps_stays(text: str) -> None:
    assert Redaction([]).redact_text(text) == text


def test_known_ids_stay_and_others_do_not() -> None:
    known, other = "3f9c0a7b1d2e4f5a3f9c0a7b1d2e4f5a", "4f9c0a7b1d2e4f5a3f9c0a7b1d2e4f5a"
    assert Redaction([], {known}).redact_text(f"{known}.snapshot {other}") == f"{known}.snapshot {REMOVED}"


def test_values_of_secret_keys_go_whatever_they_are() -> None:
    clean = Redaction([]).redact_document(
        {"password": "short", "token": "", "etcd": {"secret_key": "x y"}, "name": "short"}
    )
    assert clean == {"password": REMOVED, "token": "", "etcd": {"secret_key": REMOVED}, "name": "short"}


def test_secrets_of_a_machine_are_found(tmp_path) -> None:  # type: ignore[no-untyped-def]
    home = tmp_path / "home"
    (home / ".aws").mkdir(parents=True)
    (home / ".aws/credentials").write_text("[default]\naws_secret_access_key = from-the-file\nregion = eu-west-1\n")
    file = tmp_path / "cachefsd.env"
    file.write_text('# AWS_X=comment\nAWS_SECRET_ACCESS_KEY="from-the-env-file"\nTZ=UTC\n')
    assert set(file_secrets({"HOME": str(home)}, file)) == {"from-the-file", "from-the-env-file"}
    variables = {"AWS_SECRET_ACCESS_KEY": "s1", "AWS_REGION": "eu", "MY_TOKEN": "s2", "EDITOR": "vi",
                 "https_proxy": "http://u:s3@proxy:3128"}  # fmt: skip
    assert set(variable_secrets(variables)) == {"s1", "s2", "s3"}
    assert set(url_secrets("https://u:p%40ss@h/x?sig=a%2Fb")) == {"p%40ss", "p@ss", "a/b"}
