"""Selection, as rows: where, a change to one base request, the backend expected, and the exact reasons of others."""

from support.rows.cuda import CUDA
from support.rows.mla import MLA_ROWS
from support.rows.others import ABSENT, OTHERS
from support.rows.rocm import ROCM

ROWS = [*ROCM, *CUDA, *MLA_ROWS, *OTHERS, *ABSENT]
