"""Imported in the fork server: compiles transformers' thousand patterns of weights' names once for all forks."""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("")
