"""Imported when an example's interpreter starts: downloads are answered from a folder, without a network."""

import io
import os
import urllib.error
import urllib.request
from pathlib import Path


class _Answer(io.BytesIO):
    def __init__(self, url, content):
        super().__init__(content)
        self.url, self.length = url, len(content)


def _urlopen(request, *args, **kwargs):
    """Return the file of the folder that has the last part of the URL as its name."""
    url = getattr(request, "full_url", request)
    file = Path(os.environ["DRIVETRAIN_STAND_INS"], "downloads", url.rpartition("/")[2])
    if not file.is_file():
        raise urllib.error.URLError(f"there is no stand-in for {url}")
    return _Answer(url, file.read_bytes())


urllib.request.urlopen = _urlopen
