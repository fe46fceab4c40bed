"""Splitting a transformers vision-language model into an encoder part and a language part."""
