//! What agents and the command line say to each other.
