"""thinkfold on what others run: engines behind HTTP."""
