"""Loss and recall of sparse attention on pretrained models, and generation speed."""
