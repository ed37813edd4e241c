"""Only who proves to be the host is believed."""

import datetime
import ipaddress
import ssl
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.sources.test_http import bring
from tests.sources.web import adapter_bytes, web_server
from tp_engine.sources import FetchArea, FetchLimits, SourceError
from tp_engine.sources.http import _trusted


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a key and a certificate for 127.0.0.1, signed by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "adapters")])
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + day)
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    private = key.private_bytes(serialization.Encoding.PEM, *form)
    path.write_bytes(private + signed.public_bytes(serialization.Encoding.PEM))
    return path


@pytest.mark.parametrize("known", [True, False])
def test_a_certificate_must_be_trusted(
    known: bool, certificate: Path, area: FetchArea, monkeypatch: pytest.MonkeyPatch
) -> None:
    if known:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    _trusted.cache_clear()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with web_server(context) as web:
        web.files |= {f"team/x/{name}": data for name, data in adapter_bytes().items()}
        if known:
            assert bring(web, area) == adapter_bytes()
        else:
            limits = FetchLimits(max_bytes=10**6, attempts=1, pause=0.01)
            with pytest.raises(SourceError, match="CERTIFICATE_VERIFY_FAILED"):
                bring(web, area, limits=limits)
            assert web.asked == []
    _trusted.cache_clear()
