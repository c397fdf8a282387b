"""Which store of blobs a coordinator uses: a local directory, or a bucket, whose library only it loads."""

from umbel.server.blobs.blobs import BlobStore, BlobsUnavailable
from umbel.server.blobs.local import LocalBlobs
from umbel.server.settings import Settings


def open_blobs(settings: Settings) -> BlobStore:
    """The store that the settings name. It does nothing before `prepare`. Raises `BlobsUnavailable`."""
    if (directory := settings.blob_directory) is not None:
        return LocalBlobs(directory)
    try:
        from umbel.server.blobs.files import Scratch
        from umbel.server.blobs.model_cache import ModelCache
        from umbel.server.blobs.s3 import Bucket, S3Blobs
    except ModuleNotFoundError as error:
        raise BlobsUnavailable(
            f"a bucket needs the package {error.name}; install it in a clone of umbel: "
            "pip install -c constraints.txt '.[server,s3]'"
        ) from error
    cache = ModelCache(settings.data / "cache", settings.model_cache_bytes_max)
    return S3Blobs(Bucket(settings), Scratch(settings.data / "making"), cache)
