//! The protection of listening addresses.

use std::path::Path;

use aquifer_nbd::server::Security;
use aquifer_transport::Address;
use aquifer_transport::tls::Identity;

use crate::failure::{Failure, OrFail as _, Result};

/// Refuses an address that other hosts could reach without a certificate.
///
/// # Errors
/// The first refused address.
pub fn check<'a>(
    addresses: impl IntoIterator<Item = &'a Address>,
    tls: Option<&Path>,
) -> Result<()> {
    match addresses.into_iter().find(|address| tls.is_none() && !address.is_local()) {
        Some(address) => {
            let why = "without TLS any user of any other host could reach it";
            let help = "give --tls DIR with the certificate of a host of a cluster, \
                        or a loopback or unix address";
            Err(Failure::new(format!("listening on {address}"), why).help(help))
        }
        None => Ok(()),
    }
}

/// Returns the protection of each address: mutual TLS for TCP if there is a certificate, else none.
///
/// # Errors
/// As [`check`], or if the certificate cannot be used.
pub fn security(addresses: Vec<Address>, tls: Option<&Path>) -> Result<Vec<(Address, Security)>> {
    check(&addresses, tls)?;
    let identity = tls.map(Identity::load).transpose().or_fail(|| "reading the certificate")?;
    let secured = |address| {
        let security = match (&identity, &address) {
            (Some(identity), Address::Tcp { .. }) => Security::Tls(identity.server()),
            _ => Security::Plain,
        };
        (address, security)
    };
    Ok(addresses.into_iter().map(secured).collect())
}
