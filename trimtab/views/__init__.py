"""What people read of the control plane, as plain values: terminal, ``--json`` and a console show the same.

A view is made of the messages that services answer with, and of nothing else: no I/O, no colours, no widths.
"""
