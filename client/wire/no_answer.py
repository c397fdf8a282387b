"""Why an exchange with a coordinator brought no answer, in words that say what to do."""

import os
import socket
import ssl

import httpcore
import httpx

from umbel.client.wire.proxies import proxy_to

# X509_V_ERR_... of OpenSSL (x509_vfy.h); Python's ssl has no names for them.
_NOT_YET_VALID, _EXPIRED, _HOSTNAME_MISMATCH, _IP_MISMATCH = 9, 10, 62, 64
_TEXT_CHARS_MAX = 300


def why_no_answer(error: Exception, host: str) -> str:
    """Why there was no answer from `host` (with its port), in one line. `error`: what httpx has raised."""
    proxy = _proxy_for(error)
    match cause := _cause_of(error):
        case ssl.SSLCertVerificationError():
            return _of_certificate(cause, host)
        case ssl.SSLError() if "WRONG_VERSION_NUMBER" in str(cause):
            return (
                f"{host} does not speak TLS. If no TLS is in front of the coordinator, its address begins with http://"
            )
        case httpx.ProxyError() | httpcore.ProxyError() if proxy is not None:
            return _of_proxy(first_line(cause), proxy, host)
        case socket.gaierror():
            name = f"a name on the way to {host}" if proxy is None else f"the name of the proxy {proxy}"
            return f"{name} does not resolve ({cause.strerror}); check the address and the DNS"
        case ConnectionRefusedError() if proxy is not None:
            return f"the proxy {proxy} refused the connection, so no proxy listens there, or a firewall refuses it"
        case ConnectionRefusedError():
            return "the connection was refused, so no coordinator listens there, or a firewall refuses it"
        case httpcore.ReadTimeout():
            return "the answer did not come in time, or not all of it"
        case _:
            return first_line(error)


def first_line(error: Exception) -> str:
    """The first line of an error's text, or its type if it has none."""
    return (str(error) or type(error).__name__).splitlines()[0][:_TEXT_CHARS_MAX]


def is_untrusted(error: Exception) -> bool:
    """Whether this machine does not accept the certificate that it was shown, and will not until a person acts.

    An expired certificate is renewed, and a machine's clock may be set some time after its start.
    """
    cause = _cause_of(error)
    return isinstance(cause, ssl.SSLCertVerificationError) and cause.verify_code not in (_NOT_YET_VALID, _EXPIRED)


def _of_certificate(error: ssl.SSLCertVerificationError, host: str) -> str:
    match error.verify_code:
        case code if code in (_HOSTNAME_MISMATCH, _IP_MISMATCH):
            return (
                f"the certificate at {host} is for another name ({error.verify_message.rstrip('.')}). Use the name in "
                "the certificate as the address, or ask the coordinator's operator for a certificate with this name"
            )
        case code if code == _EXPIRED:
            return (
                f"the certificate at {host} has expired. Ask the coordinator's operator to renew it, and check this "
                "machine's clock"
            )
        case code if code == _NOT_YET_VALID:
            return f"the certificate at {host} is not valid yet. Check this machine's clock"
        case _:
            return f"this machine does not trust the certificate at {host} ({error.verify_message}). {_ca_advice()}"


def _of_proxy(answer: str, proxy: str, host: str) -> str:
    """`answer`: the status of the proxy's answer, in its words."""
    if answer.startswith("407"):
        how = "set HTTPS_PROXY=http://USER:PASSWORD@HOST:PORT, with what IT tells you"
        return f"the proxy {proxy} asks for a user name and a password: {how}"
    return (
        f"the proxy {proxy} does not connect to {host} (it answered {answer!r}). Ask IT to allow this address, or name "
        "it in NO_PROXY if the way to it needs no proxy"
    )


def _proxy_for(error: Exception) -> str | None:
    try:
        return proxy_to(error.request.url) if isinstance(error, httpx.TransportError) else None
    except RuntimeError:  # the error knows no request
        return None


def _ca_advice() -> str:
    files = [f"{name} is {os.environ[name]}" for name in ("SSL_CERT_FILE", "SSL_CERT_DIR") if os.environ.get(name)]
    if files:
        return f"{files[0]}, and has no CA that has signed it: add the coordinator's CA there, in PEM"
    return "Set SSL_CERT_FILE to a file with the coordinator's CA, in PEM. Ask IT or the coordinator's operator for it"


def _cause_of(error: BaseException) -> BaseException:
    """What httpx and httpcore have wrapped, once each. httpcore suppresses the context, but keeps it."""
    while isinstance(error, httpx.TransportError | httpcore.NetworkError):
        if (inner := error.__cause__ or error.__context__) is None:
            break
        error = inner
    return error
