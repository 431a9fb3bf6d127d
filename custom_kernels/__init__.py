"""Operations on arrays: each in a folder of its own, defined by its ``reference.py``.

Knows no model, no file and no disk. An operation never imports another one.
"""
