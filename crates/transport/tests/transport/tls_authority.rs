//! Tests of the files that the authority writes, and of its refusals.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use aquifer_transport::tls::{
    Authority, CA_CERTIFICATE, CA_KEY, HOST_CERTIFICATE, HOST_KEY, Identity, TlsError,
};
use rcgen::{CertificateParams, DnType, ExtendedKeyUsagePurpose, Issuer, KeyPair, date_time_ymd};

use crate::certificates::{Cluster, host};

#[test]
fn keys_are_for_their_owner_only() {
    let cluster = Cluster::new();
    for file in ["ca/ca.key", "lender/host.key"] {
        let mode = fs::metadata(cluster.dir(file)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{file}");
    }
}

#[test]
fn a_reopened_authority_admits_hosts_to_the_same_cluster() {
    let cluster = Cluster::new();
    let again = Authority::load(&cluster.dir("ca")).unwrap();
    again
        .issue(
            &cluster.dir("late"),
            &host("late"),
            &["late.example".into(), "10.0.0.7".into()],
            false,
        )
        .unwrap();
    assert_eq!(Identity::load(&cluster.dir("late")).unwrap().host(), &host("late"));
    let ca = |name: &str| fs::read(cluster.dir(name).join("ca.pem")).unwrap();
    assert_eq!(ca("late"), ca("lender"));
}

#[test]
fn nothing_is_overwritten_unless_forced() {
    let cluster = Cluster::new();
    let before = fs::read(cluster.dir("lender").join("host.pem")).unwrap();
    let error = cluster.try_issue("lender", &[]).unwrap_err();
    assert!(
        matches!(&error, TlsError::Exists(path) if path.ends_with("lender/host.pem")),
        "{error}"
    );
    let error = Authority::create(&cluster.dir("ca"), "another").unwrap_err();
    assert!(
        matches!(&error, TlsError::AuthorityExists(path) if path.ends_with("ca/ca.pem")),
        "{error}"
    );

    let again = Authority::load(&cluster.dir("ca")).unwrap();
    again.issue(&cluster.dir("lender"), &host("lender"), &[], true).unwrap();
    assert_ne!(fs::read(cluster.dir("lender").join("host.pem")).unwrap(), before);
    Identity::load(&cluster.dir("lender")).unwrap();
}

#[test]
fn a_missing_or_foreign_file_is_named() {
    let cluster = Cluster::new();
    let error = Identity::load(&cluster.dir("nobody")).unwrap_err().to_string();
    assert!(error.contains("nobody/host.pem"), "{error}");
    let error = Authority::load(&cluster.dir("lender")).unwrap_err().to_string();
    assert!(error.contains("lender/ca.key"), "{error}");
    fs::copy(cluster.dir("borrower").join("host.key"), cluster.dir("lender").join("host.key"))
        .unwrap();
    let error = Identity::load(&cluster.dir("lender")).unwrap_err().to_string();
    assert!(error.contains("lender/host.pem"), "{error}");
}

#[test]
fn names_that_no_certificate_can_carry_are_refused() {
    let cluster = Cluster::new();
    for name in ["10.0.0.1", "123", "a-"] {
        let error = cluster.try_issue(name, &[]).unwrap_err();
        assert!(matches!(error, TlsError::Name(_)), "{name}: {error}");
    }
    assert!(matches!(cluster.try_issue("fine", &["not fine".to_owned()]), Err(TlsError::Name(_))));
}

#[test]
fn a_host_learns_that_its_own_certificate_is_of_no_use() {
    let cluster = Cluster::new();
    let (ca, tls) = (cluster.dir("ca"), cluster.dir("lender"));
    Identity::verify_own(&tls).unwrap();

    // The same certificate, expired.
    let key = |path| KeyPair::from_pem(&fs::read_to_string(path).unwrap()).unwrap();
    let authority = fs::read_to_string(ca.join(CA_CERTIFICATE)).unwrap();
    let issuer = Issuer::from_ca_cert_pem(&authority, key(ca.join(CA_KEY))).unwrap();
    let mut params = CertificateParams::new(vec!["lender".to_owned()]).unwrap();
    params.distinguished_name.push(DnType::CommonName, "lender");
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    (params.not_before, params.not_after) = (date_time_ymd(2020, 1, 1), date_time_ymd(2021, 1, 1));
    let expired = params.signed_by(&key(tls.join(HOST_KEY)), &issuer).unwrap();
    fs::write(tls.join(HOST_CERTIFICATE), expired.pem()).unwrap();
    let error = Identity::verify_own(&tls).unwrap_err().to_string();
    assert!(error.contains("no peer would trust it") && error.contains("expired"), "{error}");
}
