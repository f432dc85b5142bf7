"""Networks whose features compare sets of images: the Inception network of the FID, and a small classifier."""
