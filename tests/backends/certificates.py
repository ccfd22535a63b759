"""Certificates for the servers of tests."""

from __future__ import annotations

import datetime as dt
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def certificate(folder: Path, name: str, address: str = "127.0.0.1") -> tuple[Path, Path]:
    """Files of a certificate of `name` and `address` that vouches for itself, and of its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    names = [x509.DNSName(name), x509.IPAddress(ipaddress.ip_address(address))]
    day, now = dt.timedelta(days=1), dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + day)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem, own = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    files = folder / f"{name}.crt", folder / f"{name}.key"
    files[0].write_bytes(made.public_bytes(pem))
    files[1].write_bytes(key.private_bytes(pem, own, serialization.NoEncryption()))
    return files
