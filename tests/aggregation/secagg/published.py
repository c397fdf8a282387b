"""Test vectors that others have published: of RFC 5869 and RFC 8032, and Project Wycheproof's for X25519."""

from typing import NamedTuple


class Exchange(NamedTuple):
    """A case of Wycheproof (testvectors_v1/x25519_test.json): its number, and three times 32 bytes, hex."""

    number: int
    public: str
    private: str
    shared: str


# flags: Ktv, Normal, Twist, SpecialPublicKey, EdgeCaseShared
TAKEN = [
    Exchange(
        1,
        "504a36999f489cd2fdbc08baff3d88fa00569ba986cba22548ffde80f9806829",
        "c8a9d5a91091ad851c668b0736c1c9a02936c0d3ad62670858088047ba057475",
        "436a2c040cf45fea9b29a0cb81b1f41458f863d0d61b453d0a982720d6d61320",
    ),
    Exchange(
        2,
        "63aa40c6e38346c5caf23a6df0a5e6c80889a08647e551b3563449befcfc9733",
        "d85d8c061a50804ac488ad774ac716c3f5ba714b2712e048491379a500211958",
        "279df67a7c4611db4708a0e8282b195e5ac0ed6f4b2f292c6fbd0acac30d1332",
    ),
    Exchange(
        7,
        "0200000000000000000000000000000000000000000000000000000000000000",
        "d03edde9f3e7b799045f9ac3793d4a9277dadeadc41bec0290f81f744f73775f",
        "b87a1722cc6c1e2feecb54e97abd5a22acc27616f78f6e315fd2b73d9f221e57",
    ),
    Exchange(
        31,
        "eaffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "d02456e456911d3c6cd054933199807732dfdc958642ad1aebe900c793bef24a",
        "07ba5fcbda21a9a17845c401492b10e6de0a168d5c94b606694c11bac39bea41",
    ),
    Exchange(
        34,
        "0400000000000000000000000000000000000000000000000000000000000000",
        "a8386f7f16c50731d64f82e6a170b142a4e34f31fd7768fcb8902925e7d1e25a",
        "34b7e4fa53264420d9f943d15513902342b386b172a0b0b7c8b8f2dd3d669f59",
    ),
    Exchange(
        62,
        "ebffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "40bd4e1caf39d9def7663823502dad3e7d30eb6eb01e9b89516d4f2f45b7cd7f",
        "2cf6974b0c070e3707bf92e721d3ea9de3db6f61ed810e0a23d72d433365f631",
    ),
    Exchange(
        100,
        "e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c",
        "a046e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449a44",
        "c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552",
    ),
    Exchange(
        101,
        "e5210f12786811d3f4b7959d0538ae2c31dbe7106fc03c3efc4cd549c715a413",
        "4866e9d4d1b4673c5ad22691957d6af5c11b6421e0ea01d42ca4169e7918ba4d",
        "95cbde9476e8907d7aade45cb4b873f88b595a68799fa152e6f8f7647aac7957",
    ),
    Exchange(
        103,
        "b7b6d39c765cb60c0c8542f4f3952ffb51d3002d4aeb9f8ff988b192043e6d0a",
        "60a3a4f130b98a5be4b1cedb7cb85584a3520e142d474dc9ccb909a073a9767f",
        "0200000000000000000000000000000000000000000000000000000000000000",
    ),
]

# flag: LowOrderPublic; the shared secret is zero for all of them
LOW_ORDER = {
    32: "0000000000000000000000000000000000000000000000000000000000000000",
    33: "0100000000000000000000000000000000000000000000000000000000000000",
    63: "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800",
    64: "5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157",
    65: "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    66: "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b880",
    67: "5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f11d7",
    68: "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff",
    74: "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    75: "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    76: "0000000000000000000000000000000000000000000000000000000000000080",
    77: "0100000000000000000000000000000000000000000000000000000000000080",
    81: "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff",
    82: "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff",
}
# the private key of the cases 69 to 82, which are those of the table above under another number
LOW_ORDER_PRIVATE = "786a33a4f7af297a20e7642925932bf509e7070fa1bc36986af1eb13f4f50b55"

# flag: NonCanonicalPublic, and a shared secret that is not zero
NON_CANONICAL = [
    Exchange(
        87,
        "efffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "0016b62af5cabde8c40938ebf2108e05d27fa0533ed85d70015ad4ad39762d54",
        "b4d10e832714972f96bd3382e4d082a21a8333a16315b3ffb536061d2482360d",
    ),
    Exchange(
        88,
        "f0ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "d83650ba7cec115881916255e3fa5fa0d6b8dcf968731bd2c9d2aec3f561f649",
        "515eac8f1ed0b00c70762322c3ef86716cd2c51fe77cec3d31b6388bc6eea336",
    ),
    Exchange(
        89,
        "f1ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "88dd14e2711ebd0b0026c651264ca965e7e3da5082789fbab7e24425e7b4377e",
        "6919992d6a591e77b3f2bacbd74caf3aea4be4802b18b2bc07eb09ade3ad6662",
    ),
    Exchange(
        90,
        "ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "98c2b08cbac14e15953154e3b558d42bb1268a365b0ef2f22725129d8ac5cb7f",
        "9c034fcd8d3bf69964958c0105161fcb5d1ea5b8f8abb371491e42a7684c2322",
    ),
    Exchange(
        91,
        "0200000000000000000000000000000000000000000000000000000000000080",
        "c0697b6f05e0f3433b44ea352f20508eb0623098a7770853af5ca09727340c4e",
        "ed18b06da512cab63f22d2d51d77d99facd3c4502e4abf4e97b094c20a9ddf10",
    ),
    Exchange(
        92,
        "0300000000000000000000000000000000000000000000000000000000000080",
        "18422b58a18e0f4519b7a887b8cfb649e0bfe4b34d75963350a9944e5b7f5b7e",
        "448ce410fffc7e6149c5abec0ad5f3607dfde8a34e2ac3243c3009176168b432",
    ),
    Exchange(
        93,
        "0400000000000000000000000000000000000000000000000000000000000080",
        "20620d82487707bedf9ee3549e95cb9390d2618f50cf6acba47ffaa103224a6f",
        "03a633df01480d0d5048d92f51b20dc1d11f73e9515c699429b90a4f6903122a",
    ),
    Exchange(
        94,
        "daffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff",
        "285a6a7ceeb7122f2c78d99c53b2a902b490892f7dff326f89d12673c3101b53",
        "9b01287717d72f4cfb583ec85f8f936849b17d978dbae7b837db56a62f100a68",
    ),
    Exchange(
        95,
        "dbffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff",
        "c8e0330ae9dceeff887fba761225879a4bd2e0db08799244136e4721b2c88970",
        "dfe60831c9f4f96c816e51048804dbdc27795d760eced75ef575cbe3b464054b",
    ),
    Exchange(
        96,
        "dcffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff",
        "10db6210fc1fb13382472fa1787b004b5d11868ab3a79510e0cee30f4a6df26b",
        "50bfa826ca77036dd2bbfd092c3f78e2e4a1f980d7c8e78f2f14dca3cce5cc3c",
    ),
    Exchange(
        97,
        "eaffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff",
        "9041c6e044a277df8466275ca8b5ee0da7bc028648054ade5c592add3057474e",
        "13da5695a4c206115409b5277a934782fe985fa050bc902cba5616f9156fe277",
    ),
    Exchange(
        98,
        "ebffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff",
        "b8d499041a6713c0f6f876db7406587fdb44582f9542356ae89cfa958a34d266",
        "63483b5d69236c63cddbed33d8e22baecc2b0ccf886598e863c844d2bf256704",
    ),
    Exchange(
        99,
        "ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff",
        "c85f08e60c845f82099141a66dc4583d2b1040462c544d33d0453b20b1a6377e",
        "e9db74bc88d0d9bf046ddd13f943bccbe6dbb47d49323f8dfeedc4a694991a3c",
    ),
]


class Derivation(NamedTuple):
    """A case of RFC 5869, appendix A: what goes into HKDF-SHA256, and the key that comes out."""

    name: str
    secret: bytes
    salt: bytes
    info: bytes
    key: str


DERIVATIONS = [
    Derivation(
        "A.1",
        bytes([0x0B] * 22),
        bytes(range(0x0D)),
        bytes(range(0xF0, 0xFA)),
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
    ),
    Derivation(
        "A.2",
        bytes(range(0x50)),
        bytes(range(0x60, 0xB0)),
        bytes(range(0xB0, 0x100)),
        "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c59045a99cac7827271cb41c65e590e09"
        "da3275600c2f09b8367793a9aca3db71cc30c58179ec3e87c14c01d5c1f3434f1d87",
    ),
    Derivation(
        "A.3",
        bytes([0x0B] * 22),
        b"",
        b"",
        "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8",
    ),
]


class Signature(NamedTuple):
    """A case of RFC 8032, section 7.1, hex."""

    name: str
    private: str
    public: str
    message: str
    signature: str


SIGNATURES = [
    Signature(
        "TEST 1",
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46b"
        "d25bf5f0595bbe24655141438e7a100b",
    ),
    Signature(
        "TEST 2",
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c"
        "387b2eaeb4302aeeb00d291612bb0c00",
    ),
    Signature(
        "TEST 3",
        "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290ae67f760984dc659"
        "4a7c15e9716ed28dc027beceea1ec40a",
    ),
    Signature(
        "TEST 1024",
        "f5e5767cf153319517630f226876b86c8160cc583bc013744c6bf255f5cc0ee5",
        "278117fc144c72340f67d0f2316e8386ceffbf2b2428c9c51fef7c597f1d426e",
        "08b8b2b733424243760fe426a4b54908632110a66c2f6591eabd3345e3e4eb98fa6e264bf09efe12"
        "ee50f8f54e9f77b1e355f6c50544e23fb1433ddf73be84d879de7c0046dc4996d9e773f4bc9efe57"
        "38829adb26c81b37c93a1b270b20329d658675fc6ea534e0810a4432826bf58c941efb65d57a338b"
        "bd2e26640f89ffbc1a858efcb8550ee3a5e1998bd177e93a7363c344fe6b199ee5d02e82d522c4fe"
        "ba15452f80288a821a579116ec6dad2b3b310da903401aa62100ab5d1a36553e06203b33890cc9b8"
        "32f79ef80560ccb9a39ce767967ed628c6ad573cb116dbefefd75499da96bd68a8a97b928a8bbc10"
        "3b6621fcde2beca1231d206be6cd9ec7aff6f6c94fcd7204ed3455c68c83f4a41da4af2b74ef5c53"
        "f1d8ac70bdcb7ed185ce81bd84359d44254d95629e9855a94a7c1958d1f8ada5d0532ed8a5aa3fb2"
        "d17ba70eb6248e594e1a2297acbbb39d502f1a8c6eb6f1ce22b3de1a1f40cc24554119a831a9aad6"
        "079cad88425de6bde1a9187ebb6092cf67bf2b13fd65f27088d78b7e883c8759d2c4f5c65adb7553"
        "878ad575f9fad878e80a0c9ba63bcbcc2732e69485bbc9c90bfbd62481d9089beccf80cfe2df16a2"
        "cf65bd92dd597b0707e0917af48bbb75fed413d238f5555a7a569d80c3414a8d0859dc65a46128ba"
        "b27af87a71314f318c782b23ebfe808b82b0ce26401d2e22f04d83d1255dc51addd3b75a2b1ae078"
        "4504df543af8969be3ea7082ff7fc9888c144da2af58429ec96031dbcad3dad9af0dcbaaaf268cb8"
        "fcffead94f3c7ca495e056a9b47acdb751fb73e666c6c655ade8297297d07ad1ba5e43f1bca32301"
        "651339e22904cc8c42f58c30c04aafdb038dda0847dd988dcda6f3bfd15c4b4c4525004aa06eeff8"
        "ca61783aacec57fb3d1f92b0fe2fd1a85f6724517b65e614ad6808d6f6ee34dff7310fdc82aebfd9"
        "04b01e1dc54b2927094b2db68d6f903b68401adebf5a7e08d78ff4ef5d63653a65040cf9bfd4aca7"
        "984a74d37145986780fc0b16ac451649de6188a7dbdf191f64b5fc5e2ab47b57f7f7276cd419c17a"
        "3ca8e1b939ae49e488acba6b965610b5480109c8b17b80e1b7b750dfc7598d5d5011fd2dcc5600a3"
        "2ef5b52a1ecc820e308aa342721aac0943bf6686b64b2579376504ccc493d97e6aed3fb0f9cd71a4"
        "3dd497f01f17c0e2cb3797aa2a2f256656168e6c496afc5fb93246f6b1116398a346f1a641f3b041"
        "e989f7914f90cc2c7fff357876e506b50d334ba77c225bc307ba537152f3f1610e4eafe595f6d9d9"
        "0d11faa933a15ef1369546868a7f3a45a96768d40fd9d03412c091c6315cf4fde7cb68606937380d"
        "b2eaaa707b4c4185c32eddcdd306705e4dc1ffc872eeee475a64dfac86aba41c0618983f8741c5ef"
        "68d3a101e8a3b8cac60c905c15fc910840b94c00a0b9d0",
        "0aab4c900501b3e24d7cdf4663326a3a87df5e4843b2cbdb67cbf6e460fec350aa5371b1508f9f4528ecea23c436d94b"
        "5e8fcd4f681e30a6ac00a9704a188a03",
    ),
    Signature(
        "TEST SHA(abc)",
        "833fe62409237b9d62ec77587520911e9a759cec1d19755b7da901b96dca3d42",
        "ec172b93ad5e563bf4932c70e1245034c35467ef2efd4d64ebf819683467e2bf",
        "ddaf35a193617abacc417349ae20413112e6fa4e89a97ea20a9eeee64b55d39a"
        "2192992a274fc1a836ba3c23a3feebbd454d4423643ce80e2a9ac94fa54ca49f",
        "dc2a4459e7369633a52b1bf277839a00201009a3efbf3ecb69bea2186c26b58909351fc9ac90b3ecfdfbc7c66431e030"
        "3dca179c138ac17ad9bef1177331a704",
    ),
]
