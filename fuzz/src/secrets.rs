//! The secrets of DH-HMAC-CHAP that hosts and targets of the fuzz targets share.

use aquifer_nvme::auth::{Secret, Secrets};

const SECRET: &str = "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";

/// Returns the secrets for mutual authentication.
pub fn secrets() -> Secrets {
    Secrets { host: secret(), controller: Some(secret()) }
}

/// Returns the secret that all hosts and targets have.
pub fn secret() -> Secret {
    SECRET.parse().expect("SECRET is a valid DH-HMAC-CHAP secret")
}
