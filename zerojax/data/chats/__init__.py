"""Prepares chats: from records and templates to a text set with the tokens of answers."""

from zerojax.data.chats.chat_preparation import PreparedChats, prepare_chats

__all__ = ["PreparedChats", "prepare_chats"]
