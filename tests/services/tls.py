"""A certificate for a server on 127.0.0.1."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.services.process import Home, ServiceError, ServiceMissing

LIMIT_S = 20.0
"""How long openssl may take."""


@dataclass(frozen=True)
class Certificate:
    """Files of a certificate that signs itself.

    Attributes:
        ca: What a client must trust.
        certificate: What the server shows.
        key: The server's secret.
    """

    ca: Path
    certificate: Path
    key: Path


def certificate_in(folder: Path) -> Certificate:
    """Return the certificate of a folder, whether it is made or not."""
    return Certificate(folder / "server.pem", folder / "server.pem", folder / "server.key")


def make_certificate(home: Home) -> None:
    """Make a certificate for 127.0.0.1 and localhost in the folder of a server.

    Raises:
        ServiceMissing: There is no openssl.
    """
    if shutil.which("openssl") is None:
        message = "no openssl was found, which makes certificates: apt-get install openssl"
        raise ServiceMissing(message)
    files = certificate_in(home.folder)
    made = subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"),
            *("-keyout", str(files.key), "-out", str(files.certificate)),
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if made.returncode != 0:
        message = f"openssl made no certificate: {made.stderr}"
        raise ServiceError(message)
    for path in (files.certificate, files.key):
        path.chmod(0o600)
        if home.ids is not None:
            os.chown(path, *home.ids)
