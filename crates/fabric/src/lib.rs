//! Pages over the network: NBD server and initiator, mutual TLS.
