"""Conversations, and the chat templates that turn them into token ids with a label mask."""
