"""Sequence layouts, device meshes and ring attention."""
