use aquifer_fabric::nvme::auth::{Secret, Secrets};

const SECRET: &str = "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";

/// What a target wants to be proved, and what it can prove.
pub fn secrets() -> Secrets {
    Secrets { host: secret(), controller: Some(secret()) }
}

/// The secret that everybody has.
pub fn secret() -> Secret {
    SECRET.parse().expect("a secret")
}
