"""The compiled CPU path: MXFP4 quantise-dequantise in C, equal to engine.formats bit for bit."""
