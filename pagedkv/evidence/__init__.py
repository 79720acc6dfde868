"""Evidence: what measures, describes the machine, writes records and checks claims against them.

hardware    what the device is, and its slug
timing      the one timer
record      canonical JSON, digest, atomic write
schema      the JSON schemas that records and claims keep to
experiment  what a notebook talks to
figures     one style, byte-stable SVG
ledger      workflow/claims.yaml
verify      claims and README against the records
doctor      what this machine can run
"""

from pagedkv.evidence.experiment import Experiment
from pagedkv.evidence.record import RecordError, published

__all__ = ["Experiment", "RecordError", "published"]
