"""The files of the uploads example: what an upload becomes, page by page. Knows nothing of databases, jobs and requests.

Every file appears under its name only when it is whole, so that whoever finds one after a crash can rely on it.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO
from uuid import UUID

from PIL import Image, ImageOps, UnidentifiedImageError

FILES = Path(os.environ.get("UPLOADS_FILES", "files"))
LARGEST = 50_000_000
"""Bytes of an upload."""


class NotAScan(ValueError):
    """What was uploaded is no picture that can be converted; says why."""


def scan_of(upload: UUID) -> Path:
    return FILES / f"{upload}.tiff"


def pdf_of(upload: UUID) -> Path:
    return FILES / f"{upload}.pdf"


def keep(upload: UUID, uploaded: BinaryIO) -> None:
    """Store an upload. Raises NotAScan, and stores nothing then."""

    def copy(path: Path) -> None:
        with path.open("wb") as file:
            while block := uploaded.read(1 << 20):
                file.write(block)
                if file.tell() > LARGEST:
                    raise NotAScan(f"expected at most {LARGEST // 1_000_000} MB")
            file.flush()
            os.fsync(file.fileno())
        try:
            with Image.open(path) as picture:
                picture.verify()
        except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError):
            raise NotAScan("expected a picture, a TIFF of many pages at best") from None

    FILES.mkdir(parents=True, exist_ok=True)
    whole(scan_of(upload), copy)


def count_pages(upload: UUID) -> int:
    with Image.open(scan_of(upload)) as scan:
        return getattr(scan, "n_frames", 1)


def convert_page(upload: UUID, number: int) -> None:
    """Make one page of the scan readable: grey, with its full contrast. One that is there already is left."""
    page = page_of(upload, number)
    if page.exists():
        return
    page.parent.mkdir(exist_ok=True)
    with Image.open(scan_of(upload)) as scan:
        scan.seek(number)
        grey = ImageOps.autocontrast(scan.convert("L"), cutoff=1)
    whole(page, lambda path: grey.save(path, format="JPEG", quality=80))


def bind(upload: UUID, pages: int) -> int:
    """Bind the pages to one PDF; its size in bytes."""
    first, *others = [Image.open(page_of(upload, number)) for number in range(pages)]
    whole(pdf_of(upload), lambda path: first.save(path, format="PDF", save_all=True, append_images=others))
    return pdf_of(upload).stat().st_size


def page_of(upload: UUID, number: int) -> Path:
    return FILES / f"{upload}.pages" / f"{number:04}.jpg"


def whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let a file be written beside its place, and put it there when it is whole."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        write(part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
