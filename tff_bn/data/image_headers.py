"""The sizes of images, from the beginnings of their files."""

import struct
from typing import IO

_PNG = b'\x89PNG\r\n\x1a\n'
_BMP = b'BM'
_JPEG = b'\xff\xd8'
# Markers of JPEG files that begin a frame, whose header has the size.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


def read_size(file: IO[bytes]) -> tuple[int, int]:
  """Returns the height and width that the header of an image declares.

  `file` is a PNG, JPEG or BMP file, at its beginning. These are the formats
  that TensorFlow decodes to single images.

  Raises:
    ValueError: If the file has no such header.
  """
  start = file.read(26)
  try:
    if start.startswith(_PNG):
      width, height = struct.unpack_from('>II', start, 16)
    elif start.startswith(_BMP):
      width, height = struct.unpack_from('<ii', start, 18)
    elif start.startswith(_JPEG):
      file.seek(len(_JPEG))
      height, width = _jpeg_size(file)
    else:
      raise ValueError('This is no PNG, JPEG or BMP file.')
  except struct.error as error:
    raise ValueError('The header ends early.') from error
  # The rows of some BMP files are in reverse order.
  return abs(height), width


def _jpeg_size(file: IO[bytes]) -> tuple[int, int]:
  """Returns the size in the frame's header, which follows other segments."""
  while True:
    (marker,) = struct.unpack('>H', file.read(2))
    while marker == 0xFFFF:  # Fill bytes.
      marker = 0xFF00 + struct.unpack('B', file.read(1))[0]
    if marker < 0xFF00:
      raise ValueError('The header has no frame.')
    (length,) = struct.unpack('>H', file.read(2))
    if marker & 0xFF in _FRAMES:
      _, height, width = struct.unpack('>BHH', file.read(5))
      return height, width
    file.seek(length - 2, 1)
