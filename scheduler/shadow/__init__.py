"""A second policy on live traffic: it is told everything, asked what it would have done, and never obeyed."""
