"""Prepares chats: converts records, by a chat template, to a set of texts with marked answers."""

from zerojax.data.chats.chat_preparation import PreparedChats, prepare_chats

__all__ = ["PreparedChats", "prepare_chats"]
