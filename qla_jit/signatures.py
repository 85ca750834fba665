"""ed25519 signatures, by the optional package cryptography; keys are in PEM files, as openssl makes them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import EnvironmentUnsuitable

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

SIGNATURE_BYTES = 64


def sign(data: bytes, key_file: Path) -> bytes:
    """The signature of the data by a private key that has no passphrase.

    Raises:
        EnvironmentUnsuitable: the key or the package cannot be used.
    """
    _require_cryptography()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(key_file.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:        # TypeError: it has a passphrase
        raise EnvironmentUnsuitable(f"{key_file} cannot be used to sign: {error}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise EnvironmentUnsuitable(f"expected an ed25519 private key in {key_file}; got {type(key).__name__}")
    return key.sign(data)


def public_key(key_file: Path) -> Ed25519PublicKey:
    """The key in a file.

    Raises:
        EnvironmentUnsuitable: the key or the package cannot be used.
    """
    _require_cryptography()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(key_file.read_bytes())
    except (OSError, ValueError) as error:
        raise EnvironmentUnsuitable(f"{key_file} cannot be used to check signatures: {error}") from None
    if not isinstance(key, Ed25519PublicKey):
        raise EnvironmentUnsuitable(f"expected an ed25519 public key in {key_file}; got {type(key).__name__}")
    return key


def has_signed(key: Ed25519PublicKey, signature: bytes, data: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(signature, data)
    except InvalidSignature:
        return False
    return True


def _require_cryptography() -> None:
    if importlib.util.find_spec("cryptography") is None:
        raise EnvironmentUnsuitable("signatures need the package cryptography, and it is not here: pip install 'qla_jit[sign]'")
