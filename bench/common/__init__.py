"""Modules that the scripts in bench/ share."""
