"""Router product BF16 x FP32 and expert choice."""
