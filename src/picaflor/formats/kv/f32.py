"""Cache page format f32: values as they were computed.

Must not know attention, pages or devices.
"""

from __future__ import annotations

import numpy as np

from picaflor.formats.kv.base import KVFormat

FORMAT = KVFormat(name="f32", dtype=np.dtype("<f4"), bytes_per_value=4.0)
