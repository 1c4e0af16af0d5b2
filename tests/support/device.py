"""The CUDA device that the tests in tests/gpu run on. Importing this skips the importing file where there is none."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

cuda = torch.device("cuda")
