"""A folder to put on a script's path: all there is in it is a module that is called apex."""
