//! A volume as a kernel block device; swap on and off.
