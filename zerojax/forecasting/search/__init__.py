"""Search for the cheapest plan that fits."""

from zerojax.forecasting.search.candidates import REMATS, Candidate, list_candidates
from zerojax.forecasting.search.search_result import SearchResult, Trial, search_dict, search_page
from zerojax.forecasting.search.searching import search

__all__ = [
    "REMATS",
    "Candidate",
    "SearchResult",
    "Trial",
    "list_candidates",
    "search",
    "search_dict",
    "search_page",
]
