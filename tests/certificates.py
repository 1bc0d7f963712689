"""An authority that signs certificates of nodes, for tests."""

import datetime
import itertools
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from cachefs_cluster.peers.tls import TlsFiles

_numbers = itertools.count()


class Authority:
    """Its files are in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"authority of {directory.name}")])
        self._path = directory / "ca.pem"
        self._path.write_bytes(_pem(self._sign(self._name, self._key.public_key(), is_authority=True)))

    def issue(self, name: str, *, alternative: bool = True) -> TlsFiles:
        """A certificate for a node of that name: as its alternative name, or only as its common name."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = self._sign(subject, key.public_key(), name if alternative else "")
        number = next(_numbers)
        cert, secret = self._directory / f"{number}.pem", self._directory / f"{number}.key"
        cert.write_bytes(_pem(certificate))
        secret.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return TlsFiles(self._path, cert, secret)

    def _sign(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, alternative: str = "", *, is_authority: bool = False
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            # Tests of this machine step its clock by days.
            .not_valid_before(now - datetime.timedelta(days=3650))
            .not_valid_after(now + datetime.timedelta(days=3650))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        )
        if alternative:
            names = x509.SubjectAlternativeName([x509.DNSName(alternative)])
            builder = builder.add_extension(names, critical=False)
        return builder.sign(self._key, hashes.SHA256())


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
