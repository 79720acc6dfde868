"""The ops: argument validation, registration with torch, compilation."""
