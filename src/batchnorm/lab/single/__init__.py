"""One network, trained by itself: any norm, any of the data sets, one process or many."""
