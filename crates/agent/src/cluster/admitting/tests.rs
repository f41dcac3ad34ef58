//! Tests of a signer's answers, without a network.

use aquifer_transport::tls::{LIFETIME, Request};
use rustls::pki_types::pem::PemObject as _;

use super::super::Token;
use super::*;
use crate::events::Events;

fn request(dir: &Path, host: &str, token: &Token) -> (Request, Join) {
    let name: HostName = host.parse().unwrap();
    let request = Request::prepare(&dir.join(host), &name).unwrap();
    let address = SocketAddr::from(([192, 0, 2, 1], 7070));
    let proof = token.proof(host, &address.to_string(), request.der());
    let der = BASE64_STANDARD.encode(request.der());
    (request, Join { token: token.id(), host: name, address, request: der, proof })
}

#[test]
fn a_host_is_admitted_and_its_name_is_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let cluster = ClusterDir::new(dir.path().join("cluster"));
    cluster.create("test").unwrap();
    let token = cluster.new_token(Duration::from_secs(60)).unwrap();
    let signer = signer(&cluster);
    let now = SystemTime::now();
    let own: HostName = "a".parse().unwrap();
    let members = BTreeMap::from([("a".parse().unwrap(), ([192, 0, 2, 9], 7070).into())]);

    let (ours, join) = request(dir.path(), "b", &token);
    let own = (&own, now);
    let first = signer.admit(&cluster, &join, own, (members.clone(), 7)).unwrap();
    let again = signer.admit(&cluster, &join, own, (members.clone(), 7)).unwrap();
    assert_eq!((first.members.len(), &first.key), (1, &again.key));
    ours.keep(&join.host, &again.certificate, &again.authority, token.authority()).unwrap();
    Identity::verify_own(&dir.path().join("b")).unwrap();

    assert_eq!(first.life, 7);
    // Another machine with the same name, and one with the signer's.
    let elsewhere = dir.path().join("elsewhere");
    for (host, what) in [
        ("b", "the name b is taken"),
        ("B", "the name B is taken"),
        ("a", "the name a is taken"),
        ("A", "the name A is taken"),
    ] {
        let (_, join) = request(&elsewhere, host, &token);
        let refused = signer.admit(&cluster, &join, own, (members.clone(), 7)).unwrap_err();
        assert!(refused.error.contains(what) && refused.help.is_some(), "{refused:?}");
    }
    for (address, what) in [
        ("0.0.0.0:7070", "0.0.0.0:7070 is not an address of one host"),
        ("[ff02::1]:7070", "[ff02::1]:7070 is not an address of one host"),
        ("192.0.2.9:7070", "a is at 192.0.2.9:7070"),
    ] {
        let (request, mut join) = request(&elsewhere, "c", &token);
        join.address = address.parse().unwrap();
        join.proof = token.proof("c", address, request.der());
        let refused = signer.admit(&cluster, &join, own, (members.clone(), 0)).unwrap_err();
        assert_eq!(refused.error, what);
    }
    // A token of another cluster, and a proof for another request.
    let (_, mut join) = request(&elsewhere, "c", &token);
    join.host = "d".parse().unwrap();
    let refused = signer.admit(&cluster, &join, own, (members, 7)).unwrap_err();
    assert_eq!(refused.error, "a does not know this token");
    assert!(!cluster.path().join("hosts/d.pem").exists());
}

fn signer(cluster: &ClusterDir) -> Signer {
    Signer {
        dir: Arc::new(Mutex::new(cluster.clone())),
        lifetime: LIFETIME,
        has_heard: Arc::new(watch::Sender::new(true)),
    }
}

/// A signer 'a' in a directory, and a token of it.
struct Cluster {
    dir: tempfile::TempDir,
    admission: Admission,
    token: Token,
}

impl Cluster {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let cluster = ClusterDir::new(dir.path().join("cluster"));
        let host: HostName = "a".parse().unwrap();
        cluster.create("test").unwrap().issue(&dir.path().join("a"), &host, &[], false).unwrap();
        let token = cluster.new_token(Duration::from_secs(60)).unwrap();
        let identity = Identity::load(&dir.path().join("a")).unwrap();
        let peers =
            Peers::new(&host, &[], BTreeMap::new(), &identity.client_config(), Events::default());
        let own = SocketAddr::from(([192, 0, 2, 9], 7070));
        let signer = Some(signer(&cluster));
        let admission = Admission { signer, host, own, identity, peers, gossip: None };
        Self { dir, admission, token }
    }

    fn cluster(&self) -> ClusterDir {
        ClusterDir::new(self.dir.path().join("cluster"))
    }

    fn authority(&self, lifetime: Duration) -> Authority {
        Authority::load(self.cluster().path()).unwrap().with_lifetime(lifetime)
    }

    /// Makes a host join from a directory of this name.
    fn join(&self, machine: &str, host: &str) -> Certified {
        let (_, join) = request(&self.dir.path().join(machine), host, &self.token);
        certified(&self.admission.admit(&join, true).unwrap().certificate)
    }

    fn renew(&self, from: &Certified) -> Result<Certified, String> {
        let host = host_name(&from.certificate).unwrap();
        let next = Renewal::prepare(self.dir.path(), &host).unwrap();
        let next = BASE64_STANDARD.encode(next.der());
        self.admission.renew(from, &next).map(|pem| certified(&pem)).map_err(|why| why.error)
    }

    fn forget(&self, host: &str, force: bool) -> SystemTime {
        let host: HostName = host.parse().unwrap();
        let order = Forget { host: host.clone(), force };
        let until = self.admission.forget(&order).unwrap();
        self.admission.free(&host, until).unwrap();
        until
    }

    fn is_revoked(&self, host: &str, certified: &Certified) -> bool {
        let host: HostName = host.parse().unwrap();
        self.admission.identity.revocations().covers(&host, &certified.validity)
    }
}

fn certified(pem: &str) -> Certified {
    let certificate = CertificateDer::from_pem_slice(pem.as_bytes()).unwrap();
    Certified { validity: Validity::of(&certificate).unwrap(), certificate }
}

#[test]
fn a_revoked_host_renews_nothing_over_an_open_connection() {
    let cluster = Cluster::new();
    let first = cluster.join("one", "b");
    let second = cluster.renew(&first).unwrap();
    cluster.admission.forget(&Forget { host: "b".parse().unwrap(), force: true }).unwrap();
    for shown in [&first, &second] {
        let error = cluster.renew(shown).unwrap_err();
        assert!(error.contains("the certificates of b are revoked"), "{error}");
    }
    let record = cluster.cluster().record(&"b".parse().unwrap()).unwrap().unwrap();
    assert!(record.has_key_of(&second.certificate), "the name is taken until all hosts know");
}

#[test]
fn a_new_member_of_a_free_name_is_not_revoked() {
    let cluster = Cluster::new();
    let mut former = cluster.join("machine-0", "b");
    for machine in ["machine-1", "machine-2", "machine-3"] {
        // All within one second.
        let until = cluster.forget("b", false);
        let new = cluster.join(machine, "b");
        assert!(cluster.is_revoked("b", &former) && !cluster.is_revoked("b", &new));
        let renewed = cluster.renew(&new).unwrap();
        assert!(!cluster.is_revoked("b", &renewed) && cluster.renew(&former).is_err());
        // A call that is late frees the name of nobody else.
        cluster.admission.free(&"b".parse().unwrap(), until).unwrap();
        assert!(cluster.cluster().record(&"b".parse().unwrap()).unwrap().is_some());
        former = renewed;
    }
}

#[test]
fn a_revocation_covers_what_a_wrong_clock_issued() {
    let cluster = Cluster::new();
    let (host, now): (HostName, _) = ("b".parse().unwrap(), SystemTime::now());
    let first = cluster.join("one", "b");
    // For an hour, the clock of the signer was a year ahead.
    let next = Renewal::prepare(cluster.dir.path(), &host).unwrap();
    let issued = now + 365 * DAY;
    let early = cluster.authority(LIFETIME).sign(next.der(), &host, &[], issued).unwrap();
    let record = cluster.cluster().record(&host).unwrap().unwrap();
    let record = record.with(&early, Some(&first.certificate));
    cluster.cluster().keep_record(&host, &record).unwrap();
    let early = certified(&early);
    assert!(early.is_lapsed() && early.validity.is_due(now));
    let renewed = cluster.renew(&early).unwrap();
    assert!(!renewed.is_lapsed() && !renewed.validity.is_due(now));
    let once_more = cluster.renew(&renewed).unwrap();
    cluster.forget("b", false);
    for shown in [&first, &early, &renewed, &once_more] {
        assert!(cluster.is_revoked("b", shown));
    }
    // Nobody would accept a certificate that is later than all of those.
    let (_, join) = request(&cluster.dir.path().join("two"), "b", &cluster.token);
    let refused = cluster.admission.admit(&join, true).unwrap_err();
    assert!(refused.error.contains("certificates of the future"), "{refused:?}");
}

#[test]
fn revocations_last_until_no_certificate_can_be_renewed() {
    let (known, now) = (Revocations::default(), SystemTime::now());
    let host: HostName = "b".parse().unwrap();
    let cluster = Cluster::new();
    let week = cluster.join("one", "b");
    let record = cluster.cluster().record(&host).unwrap().unwrap();
    let (until, ends) = revocation_times(&record, &known, &host, now);
    assert!(until >= now && until >= week.validity.issued);
    // It may also have one of ten years, which another signer made before its upgrade.
    assert!(ends >= until + TEN_YEARS + GRACE && ends < until + TEN_YEARS + 90 * DAY);

    let next = Renewal::prepare(cluster.dir.path(), &host).unwrap();
    let years = cluster.authority(TEN_YEARS).sign(next.der(), &host, &[], now).unwrap();
    let record = Record::of(&years).with(&years, None);
    for record in [record, Record::default()] {
        let (_, ends) = revocation_times(&record, &known, &host, now);
        assert!(ends >= now + TEN_YEARS);
    }
}

#[test]
fn a_certificate_of_years_must_be_of_the_host_here() {
    let cluster = Cluster::new();
    let host: HostName = "b".parse().unwrap();
    let next = Renewal::prepare(cluster.dir.path(), &host).unwrap();
    let sign = |renewal: &Renewal| {
        let authority = cluster.authority(TEN_YEARS);
        certified(&authority.sign(renewal.der(), &host, &[], SystemTime::now()).unwrap())
    };
    // Before hosts could be revoked, another machine had the name.
    let former = sign(&Renewal::prepare(cluster.dir.path(), &host).unwrap());
    let error = cluster.renew(&former).unwrap_err();
    assert!(error.contains("of another machine"), "{error}");
    let own = sign(&next);
    cluster.join("one", "b");
    let error = cluster.renew(&own).unwrap_err();
    assert!(error.contains("of another machine"), "{error}");

    let record = cluster.cluster().record(&host).unwrap().unwrap();
    let pem = record.with(&pem_of(&own), None);
    cluster.cluster().keep_record(&host, &pem).unwrap();
    // The answer may be lost, again and again.
    for _ in 0..3 {
        let renewed = cluster.renew(&own).unwrap();
        assert_eq!(renewed.validity.lifetime(), LIFETIME);
    }
    assert!(cluster.renew(&former).is_err());
}

fn pem_of(certified: &Certified) -> String {
    let body = BASE64_STANDARD.encode(&certified.certificate);
    format!("-----BEGIN CERTIFICATE-----\n{body}\n-----END CERTIFICATE-----\n")
}

#[test]
fn a_signer_hears_of_revocations_before_it_renews() {
    let cluster = Cluster::new();
    let first = cluster.join("one", "b");
    cluster.admission.signer.as_ref().unwrap().has_heard.send_replace(false);
    let error = cluster.renew(&first).unwrap_err();
    assert!(error.contains("asks the other hosts first"), "{error}");
    cluster.admission.allow_renewals();
    cluster.renew(&first).unwrap();
}

#[test]
fn the_tokens_of_a_hostile_host_end_and_others_do_not() {
    let cluster = Cluster::new();
    let other = cluster.cluster().new_token(Duration::from_secs(60)).unwrap();
    cluster.join("one", "b");
    cluster.forget("b", false);
    cluster.join("two", "b");
    cluster.forget("b", true);
    let ask = |token: &Token| {
        let (_, join) = request(&cluster.dir.path().join(token.id()), "b", token);
        cluster.admission.admit(&join, true).map_err(|refused| refused.error)
    };
    assert_eq!(ask(&cluster.token).unwrap_err(), "a does not know this token");
    let joined = ask(&other).unwrap();
    // The new member begins with what its signer knows.
    let known = joined.revocations.unwrap();
    assert_eq!(known.revoked.len(), 1);
    assert_eq!(known.revoked[0].host.as_str(), "b");
}

#[test]
fn a_revoked_signer_renews_itself_no_more() {
    let cluster = Cluster::new();
    let own = &cluster.admission.identity;
    cluster.admission.renew_own(&cluster.dir.path().join("a")).unwrap();
    let until = own.validity().issued;
    let revoked = cluster.authority(LIFETIME).revoke(own.host(), until, until + 90 * DAY);
    own.revoke(vec![revoked.unwrap()]).unwrap();
    let refused = cluster.admission.renew_own(&cluster.dir.path().join("a")).unwrap_err();
    assert!(refused.error.contains("another signer revoked a"), "{refused:?}");
}

#[test]
fn a_host_of_an_older_version_gets_a_lasting_certificate() {
    let cluster = Cluster::new();
    let (_, join) = request(&cluster.dir.path().join("one"), "b", &cluster.token);
    let old = certified(&cluster.admission.admit(&join, false).unwrap().certificate);
    assert_eq!(old.validity.lifetime(), TEN_YEARS);
    // After its upgrade, it renews.
    assert_eq!(cluster.renew(&old).unwrap().validity.lifetime(), LIFETIME);
}

#[test]
fn what_another_signer_revoked_escapes_by_no_renewal() {
    let cluster = Cluster::new();
    let (host, own): (HostName, _) = ("b".parse().unwrap(), &cluster.admission.identity);
    let hosts = [host];
    let first = cluster.join("one", "b");
    let revoke = |until| {
        let revoked = cluster.authority(LIFETIME).revoke(&hosts[0], until, until + TEN_YEARS);
        own.revoke(vec![revoked.unwrap()]).unwrap();
    };
    // This signer renews it often before it hears.
    let mut record = cluster.cluster().record(&hosts[0]).unwrap().unwrap();
    let mut shown = first.clone();
    for hours in 1..4 {
        let next = Renewal::prepare(cluster.dir.path(), &hosts[0]).unwrap();
        let issued = first.validity.issued + Duration::from_secs(hours * 3600);
        let signed = cluster.authority(LIFETIME).sign(next.der(), &hosts[0], &[], issued).unwrap();
        record = record.with(&signed, Some(&shown.certificate));
        shown = certified(&signed);
    }
    cluster.cluster().keep_record(&hosts[0], &record).unwrap();
    assert!(cluster.admission.revoke_late(&hosts).unwrap().is_empty());
    revoke(first.validity.issued + Duration::from_secs(10));
    assert!(!cluster.is_revoked("b", &shown));
    assert_eq!(cluster.admission.revoke_late(&hosts).unwrap(), hosts);
    assert!(cluster.is_revoked("b", &shown) && cluster.renew(&shown).is_err());
    assert!(cluster.admission.revoke_late(&hosts).unwrap().is_empty());

    // A machine that joined with another signer since then renews here.
    let issued = own.revocations().until(&hosts[0]).unwrap() + Duration::from_secs(1);
    let request = Renewal::prepare(cluster.dir.path(), &hosts[0]).unwrap();
    let joined = cluster.authority(LIFETIME).sign(request.der(), &hosts[0], &[], issued).unwrap();
    let renewed = cluster.renew(&certified(&joined)).unwrap();
    assert!(cluster.admission.revoke_late(&hosts).unwrap().is_empty());
    assert!(!cluster.is_revoked("b", &renewed));
}

#[test]
fn a_restored_signer_revokes_no_new_machine() {
    let cluster = Cluster::new();
    let first = cluster.join("one", "b");
    cluster.forget("b", false);
    let new = cluster.join("two", "b");
    let renewed = cluster.renew(&new).unwrap();
    // It hears of the revocation again.
    assert!(cluster.admission.revoke_late(&["b".parse().unwrap()]).unwrap().is_empty());
    assert!(cluster.is_revoked("b", &first) && !cluster.is_revoked("b", &renewed));
}
