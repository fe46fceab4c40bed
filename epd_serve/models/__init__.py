"""Split a transformers multimodal model into an encoder part and a language part."""
